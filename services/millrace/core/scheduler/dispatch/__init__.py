"""The work of a step: place, plan and send requests, follow their progress, recover losses."""
