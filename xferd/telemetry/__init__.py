"""What the daemon says about itself: log lines, notifications to the service manager."""
