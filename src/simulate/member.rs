//! Members of a job, as state machines of the protocol. Members in the same state are represented by one machine.

use super::scenario::SessionChoices;
use crate::error::{Error, Result};
use crate::protocol::{Command, Event, Participant, Protocol, Settings, Standing};

/// Established members and newcomers.
pub(super) struct Members {
    session: SessionChoices,
    old: Protocol,
    /// Newcomers, until they are in the same state as the others.
    new: Option<Protocol>,
    /// Ids of the machines that represent the group.
    ids: Vec<String>,
    /// Number of the newest set that the Lighthouse has named.
    pub(super) set: u64,
    /// Number of members of the group.
    pub(super) size: usize,
    /// The latest report of the members.
    pub(super) standing: Option<Standing>,
}

impl Members {
    /// Processes that have just started.
    pub(super) fn new(session: &SessionChoices, generation: u64) -> Self {
        let ids = vec![format!("first {generation}")];
        let old = Protocol::new(settings(session, &ids[0], generation));
        Self { session: session.clone(), old, new: None, ids, set: generation, size: 0, standing: None }
    }

    pub(super) fn generation(&self) -> u64 {
        self.old.generation()
    }

    pub(super) fn is_established(&self) -> bool {
        self.old.is_established()
    }

    /// Handles an event; returns the commands of the members.
    pub(super) fn handle(&mut self, event: Event) -> Result<Vec<Command>> {
        if let Some(new) = &mut self.new {
            match event {
                Event::Lost { .. } => self.new = None, // newcomers ask again
                Event::Look { .. } | Event::Compared { .. } => {}
                _ => {
                    new.handle(event.clone())?;
                }
            }
        }
        self.old.handle(event)
    }

    /// Informs the training members that others wait at the Lighthouse.
    pub(super) fn overhear_newcomers(&mut self) -> Result<()> {
        let Some(standing) = self.standing.clone() else { return Ok(()) };
        let mut participants = self.old_ones(&standing, false);
        let (id, mut newcomer) = self.newcomer();
        participants.push(participant(&id, asked(&mut newcomer)?, true));
        self.old.handle(Event::Overheard { id: self.set + 1, participants, is_refused: false }).map(|_| ())
    }

    /// The Lighthouse's answer: the survivors, and any newcomers.
    ///
    /// After a loss, one machine stands for all survivors.
    pub(super) fn answer(
        &mut self,
        standing: Standing,
        is_intact: bool,
        has_newcomers: bool,
    ) -> Result<Event> {
        self.set += 1;
        if !is_intact {
            self.ids.truncate(1);
        }
        let mut participants = self.old_ones(&standing, true);
        self.new = None;
        if has_newcomers {
            let (id, mut newcomer) = self.newcomer();
            participants.push(participant(&id, asked(&mut newcomer)?, true));
            self.ids.push(id);
            self.new = Some(newcomer);
        }
        Ok(self.quorum(&participants))
    }

    fn quorum(&self, participants: &[Participant]) -> Event {
        Event::Quorum { id: self.set, participants: participants.to_vec(), is_promoted: false }
    }

    fn old_ones(&self, standing: &Standing, waits: bool) -> Vec<Participant> {
        self.ids.iter().map(|id| participant(id, standing.clone(), waits)).collect()
    }

    fn newcomer(&self) -> (String, Protocol) {
        let id = format!("next {}", self.set);
        let settings = settings(&self.session, &id, 0);
        (id, Protocol::new(settings))
    }

    /// Ends a recovery: newcomers are now in the state of the others.
    pub(super) fn settle(&mut self) -> Result<()> {
        let Some(new) = self.new.take() else { return Ok(()) };
        let is_same = new.version() == self.old.version() && new.generation() == self.old.generation();
        if is_same {
            return Ok(());
        }
        Err(Error::Internal(format!(
            "simulate: newcomers are at version {}, the others at {}, after the same recovery",
            new.version(),
            self.old.version()
        )))
    }
}

fn settings(session: &SessionChoices, id: &str, generation: u64) -> Settings {
    Settings {
        id: id.into(),
        trains: true,
        is_spare: false,
        members: 1,
        is_fixed: false,
        allows_solo_resume: false,
        needs_majority: false,
        join_interval: session.join_interval,
        rebalance_interval: session.rebalance_interval,
        generation,
    }
}

pub(super) fn participant(id: &str, standing: Standing, waits: bool) -> Participant {
    Participant {
        id: id.into(),
        rank_key: String::new(),
        island: None,
        trains: true,
        waits,
        is_patient: false,
        unreachable: Vec::new(),
        standing,
    }
}

/// Report of a process that has just started.
fn asked(newcomer: &mut Protocol) -> Result<Standing> {
    let commands = newcomer.handle(Event::Look { until: u64::MAX >> 24 })?;
    let standing = commands.into_iter().find_map(|command| match command {
        Command::Ask { standing, .. } => Some(standing),
        _ => None,
    });
    standing.ok_or_else(|| {
        Error::Internal("simulate: a process that has started does not ask the Lighthouse".into())
    })
}
