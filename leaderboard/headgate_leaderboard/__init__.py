"""Every policy on the same requests, judged by every promise: `headgate leaderboard`."""
