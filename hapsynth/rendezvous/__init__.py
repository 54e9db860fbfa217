"""Where the processes of a job meet: address, client, server, meetings."""
