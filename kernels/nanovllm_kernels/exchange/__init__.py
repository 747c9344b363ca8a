"""Sums and gathers over the GPUs of a host, through peer memory."""
