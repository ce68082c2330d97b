"""Studies of FedSODA: a recount of the paper's figures, and measurements."""
