"""A site's client of the coordinator: enrolment, orders, reports."""
