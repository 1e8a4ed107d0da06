//! A message that is under way, as who waits for it has it.

use super::item::Item;
use super::table::Table;
use std::sync::Arc;
use std::time::Duration;

/// A message that is under way. Its memory is in use until it is over or dropped.
#[derive(Debug)]
pub struct Transfer {
    number: u64,
    item: Arc<Item>,
    table: Arc<Table>,
}

impl Transfer {
    pub(super) fn new(number: u64, item: Arc<Item>, table: Arc<Table>) -> Self {
        Self { number, item, table }
    }

    /// Waits until it is over: the bytes that were sent or have come, or why it failed. None if that takes longer than
    /// the limit.
    pub fn wait(&self, limit: Duration) -> Option<Result<usize, String>> {
        self.item.wait(limit)
    }
}

impl Drop for Transfer {
    /// Gives the memory back. Half a message cannot be taken back: the connections end with it.
    fn drop(&mut self) {
        self.item.fail("nobody waits for it any more");
        if self.item.is_moving() {
            self.table.end("a message was given up half way");
            self.item.wait_still();
        }
        self.table.forget(self.number);
    }
}
