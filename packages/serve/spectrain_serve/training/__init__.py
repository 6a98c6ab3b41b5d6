"""What a training takes from a server: the states of its data, and answers."""
