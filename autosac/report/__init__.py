"""What people read and look at: tables, texts and pictures."""
