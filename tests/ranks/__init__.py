"""Programs that tests run on several ranks, and what they share."""
