"""What single client packages need beyond the APIs: a module per package."""
