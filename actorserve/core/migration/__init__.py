"""Moving a running request to another instance: Llumnix's live migration, and which instances are paired."""
