"""Atomic rounds of all sites: quorum, leader, member, reduction, votes, proofs, roster, states and catching up."""
