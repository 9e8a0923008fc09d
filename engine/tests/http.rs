//! The real binary from outside: its command line, its routes, PEFT's answers, and the bugs that users of other servers
//! had to report.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

mod http {
    mod held;
    mod server;
    mod wide;

    mod admin;
    mod cases;
    mod during;
    mod keys_and_paths;
    mod large;
    mod lifecycle;
    mod metrics;
    mod mixing;
    mod openai;
    mod placement;
    mod restart;
    mod tiers;
}
