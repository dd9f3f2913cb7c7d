"""Several runs on one machine or cluster: who starts, who waits, who gives way."""
