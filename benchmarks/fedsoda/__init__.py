"""What FedSODA's paper prints, and what comes out when it is counted or measured here."""
