"""What becomes of requests: refused, or ended with objectives met or missed."""
