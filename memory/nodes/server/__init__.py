"""A memory node's side: sessions of engines, their pages, and attention over them."""
