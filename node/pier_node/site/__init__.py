"""The daemon of a site: joining, the training loop of each kind of run, leaving, journal, reports and status."""
