"""Tasks: questions with answers for training and scoring; ``catalogue.py`` lists them."""
