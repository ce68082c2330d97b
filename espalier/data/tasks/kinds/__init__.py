"""Tasks by kind: what is asked, and what an answer looks like."""
