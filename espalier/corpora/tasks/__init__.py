"""Tasks: questions with answers, on which clients train and by which models are scored. A task is data: see catalogue.py."""
