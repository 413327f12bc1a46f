"""The cluster's file: its hosts, what runs on them, and where their processes listen."""
