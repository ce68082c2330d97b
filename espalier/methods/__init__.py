"""Methods: settings, contracts and registration."""
