"""`pier-node demo`: several sites on this machine train a small model together, and you watch."""
