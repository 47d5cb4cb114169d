"""What becomes of requests: refused, ended, with objectives met or missed."""
