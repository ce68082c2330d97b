"""Policy of a site: limits, identity, egress check and log, approval of replies."""
