"""Study of aggregation rules: bad clients, and the quality with and without each rule."""
