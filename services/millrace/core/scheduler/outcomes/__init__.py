"""What becomes of requests: refused, quarantined, ended, with objectives met or missed."""
