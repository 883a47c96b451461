"""Who a node is: its key, the run's token, invites, certificates and signatures."""
