"""What the trainer hands over: the only folder that knows torch's objects."""
