"""Model directories: configuration, family, plan, and checks against plain transformers."""
