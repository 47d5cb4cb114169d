"""`millrace profile`: measures a model on this machine and writes its profile."""
