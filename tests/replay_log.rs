//! Records give back what went in, no flipped bit passes, and the log stays in order and within its bound.
