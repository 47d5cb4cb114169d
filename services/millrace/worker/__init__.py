"""What prefill and decode instances share: identity, link to the scheduler, wire conversions."""
