"""What every trainer plugin shares: settings, preflight, publishing over a group, constraints and records."""
