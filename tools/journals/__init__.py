"""What journals of real servers (``cluster.journal_dir``) tell about their iterations."""
