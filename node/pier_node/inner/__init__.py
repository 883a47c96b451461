"""Training inside a site: what runs in its workers, and the daemon's link to them."""
