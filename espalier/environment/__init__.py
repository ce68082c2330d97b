"""Environment of a process: paths, optional libraries, proxies and untrusted JSON."""
