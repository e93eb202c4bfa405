"""Games: frozen lake and Sokoban are built in. Adapters for other packages need an extra each."""
