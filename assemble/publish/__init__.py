"""The Hub: uploads a proven checkpoint, and proves that what lies there is the same."""
