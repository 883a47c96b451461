"""A site's client for the coordinator: enrolment, orders and reports."""
