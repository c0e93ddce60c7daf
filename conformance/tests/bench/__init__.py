"""What the golden pass costs beside the definition and references as in other projects' tests."""
