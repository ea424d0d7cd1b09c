use ate_name::AtespaceName;
use ate_store::{Change, CommitError, Guard, Kind};

use crate::records::{AtespaceRecord, Read, actors_of, atespace_key, encode};
use crate::{Code, Control, ControlError};

impl Control {
    pub async fn create_atespace(&self, name: &AtespaceName) -> Result<(), ControlError> {
        let record = AtespaceRecord { name: name.clone(), quota: Default::default(), limits: 0 };
        match self.store.commit(Change::new().create(atespace_key(name), encode(&record))).await {
            Ok(_) => Ok(()),
            Err(CommitError::Conflict { .. }) => {
                Err(ControlError::new(Code::AlreadyExists, format!("Atespace {name} already exists")))
            }
            Err(error) => Err(error.into()),
        }
    }

    pub async fn get_atespace(&self, name: &AtespaceName) -> Result<(), ControlError> {
        match self.store.get(&atespace_key(name)).await? {
            Some(_) => Ok(()),
            None => Err(ControlError::atespace_not_found(name)),
        }
    }

    pub async fn list_atespaces(&self) -> Result<Vec<AtespaceName>, ControlError> {
        let records = self.all(Kind::Atespace).await?;
        records.into_iter().map(|record| Ok(Read::<AtespaceRecord>::decode(record)?.value.name)).collect()
    }

    pub async fn delete_atespace(&self, name: &AtespaceName) -> Result<(), ControlError> {
        let key = atespace_key(name);
        let change = Change::new().guard(Guard::Present(key.clone())).guard(Guard::Empty(actors_of(name))).delete(key);
        match self.store.commit(Self::without_counts(change, name)).await {
            Ok(_) => Ok(()),
            Err(CommitError::Conflict { guard: Guard::Empty(_) }) => {
                Err(ControlError::precondition(format!("Atespace {name} is not empty")))
            }
            Err(CommitError::Conflict { .. }) => Err(ControlError::atespace_not_found(name)),
            Err(error) => Err(error.into()),
        }
    }
}
