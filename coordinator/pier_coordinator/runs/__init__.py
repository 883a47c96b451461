"""A run as its coordinator sees it: sites, orders, and the read model behind the page."""
