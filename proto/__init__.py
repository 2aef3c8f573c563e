"""The nouns that travel between the rooms of paceline, and nothing that acts on them."""
