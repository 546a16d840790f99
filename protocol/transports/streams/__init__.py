"""What two peers say to each other over one stream: requests, exchanges, channels."""
