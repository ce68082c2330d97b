"""Statistics by which structured methods choose groups."""
