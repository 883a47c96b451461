"""The daemon of a site: joining, its loop in every kind of run, leaving, its journal, reports and status."""
