"""What each part of the system records, declared key by key."""
