"""What leaves the process as text: masked, cleaned and printed."""
