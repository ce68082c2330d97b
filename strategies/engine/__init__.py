"""Shared parts of all methods: life of a run, rounds of messages, enrolment and files on disk."""
