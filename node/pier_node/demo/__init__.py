"""`pier-node demo`: several sites on this machine train a small model together while the user watches."""
