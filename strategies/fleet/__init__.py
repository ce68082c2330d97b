"""Virtual time of a simulated fleet of devices."""
